"""Bytes between ranks: how they travel, and how they are measured. Knows torch, never Lightning."""
