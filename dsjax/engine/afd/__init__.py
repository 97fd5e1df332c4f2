"""Attention and experts apart (AFD): the experts' devices, and the host's way from one side to the other, layer by layer."""
