"""Kills, damage and full disks: nothing good may be lost."""
