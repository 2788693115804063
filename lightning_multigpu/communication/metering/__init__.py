"""The meter: what moved between ranks, when, and how much of that time compute hid."""
