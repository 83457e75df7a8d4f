"""How a linear map's weight is stored: what fills it, what is made of that, and which kernels multiply by it."""
