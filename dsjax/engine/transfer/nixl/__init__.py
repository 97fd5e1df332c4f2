"""NVIDIA's NIXL as a transport: agents of two processes, one of which reads the other's registered memory."""
