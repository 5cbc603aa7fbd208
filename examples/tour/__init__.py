"""Tours: one model that visits three holders of data, each of them a process."""
