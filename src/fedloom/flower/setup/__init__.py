"""Set-up of a deployment: the project folder, certificates, and the bundle for the sites.

Needs the extra ``flower`` (``pip install "fedloom[flower]"``).
"""
