"""ONNX files, and int8: written, compared with torch, run."""
