"""Turn raw records into Arrow batches, column by column."""
