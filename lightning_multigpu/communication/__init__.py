"""Transport and measurement of bytes between ranks, in torch without Lightning."""
