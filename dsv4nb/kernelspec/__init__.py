"""A Python kernel that starts with the extension: "DeepSeek V4 (dsv4nb)"."""
