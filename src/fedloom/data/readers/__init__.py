"""Readers of users' data: folders, tables, masks, arrays, torch datasets."""
