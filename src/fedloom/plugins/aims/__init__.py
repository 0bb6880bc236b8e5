"""FedAIMS's plug-in."""
