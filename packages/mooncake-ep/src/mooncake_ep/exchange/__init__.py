"""How ranks of one host exchange rows: windows of shared memory, and the rounds in which they are used."""
