"""The process group between hosts: ranks joined by connections, without shared memory and compiled code."""
