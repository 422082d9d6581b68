"""Release and restore device memory, and keep named weight snapshots in host memory."""
