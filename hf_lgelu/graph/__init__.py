"""What is read off a recording of a forward pass: its operations, its linear maps, and the layers around each gate."""
