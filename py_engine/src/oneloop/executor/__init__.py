"""Where steps run: the protocol in `base`, one file per implementation."""
