"""Small state files of a store, each written in place and checked by a CRC."""
