"""Building blocks of models over the operations of oneloop_kernels. Each owns its weights and names their sources."""
