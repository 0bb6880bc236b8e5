"""FedMAP's plug-in and its priors."""
