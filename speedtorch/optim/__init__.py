"""Any optimizer of torch on held rows: its state beside them, hooks around its steps."""
