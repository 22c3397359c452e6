"""Records of trained networks and of what was measured on them → the report's part on what ReLU networks allow."""
