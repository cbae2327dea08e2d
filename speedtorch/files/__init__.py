"""Arrays and tables in files: formats, new files that appear whole, every call on a file."""
