"""The picture of the whole path: smooth training → hardness → ReLU → what it enables."""
