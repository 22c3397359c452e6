"""Records → tables, one file a table."""
