"""Who holds and who owns which part of which tensor, and what follows from it for all strategies; without Lightning."""
