"""`hastore pipeline`: the jobs on Spark, as commands and as a script for spark-submit."""
