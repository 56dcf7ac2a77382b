"""The families of clients that the server speaks with, one folder each, behind one contract."""
