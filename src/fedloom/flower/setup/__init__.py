"""Real sites: an experiment that a consortium agrees on, the data of a site, and the processes of both sides.

Needs the extra ``flower`` (``pip install "fedloom[flower]"``).
"""
