"""Arrays and tables in files: file formats, atomic replacement of files, and file calls."""
