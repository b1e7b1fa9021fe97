"""Workers: units of work, which of them gets what, what they do, and the transports to them."""
