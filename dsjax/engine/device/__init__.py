"""The executor on a mesh: launches, slots, device state, programs, the sampler."""
