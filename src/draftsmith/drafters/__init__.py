"""The trained model: its layers, its shape and its first weights from a target."""
