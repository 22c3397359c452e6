"""How files and folders are written, whole or not at all, and followed. No file here knows what a model is."""
