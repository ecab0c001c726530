"""Runs a command in a throw-away QEMU guest with Debian's own kernel; see README.md beside this folder."""
