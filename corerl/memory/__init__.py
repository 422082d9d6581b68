"""Storage released and restored, and weights kept by name in host memory."""
