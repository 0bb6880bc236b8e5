"""What servers do with the clients' updates beyond a mean."""

from fedloom.aggregators.robust import krum, median, trimmed_mean
from fedloom.aggregators.steps import server_step

__all__ = ["krum", "median", "server_step", "trimmed_mean"]
