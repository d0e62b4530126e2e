"""Building blocks of model definitions: plain modules that call camshaft ops. No device, cache or quantisation here."""
