"""int8 by onnxruntime: ranges made alike beforehand, the file, and how far it is from float."""
