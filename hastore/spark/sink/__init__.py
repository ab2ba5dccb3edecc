"""Write DataFrames and streams to running nodes, each row once.

    options    the options of a write, and which column is the body, the key, ...
    records    an Arrow batch to records, by vectors; the identities of its rows
    task       write the rows of one task; spark/writer.py has the classes that Spark calls

**Why each row is stored once.** Spark may run a task several times: it repeats failed tasks, runs
slow ones twice (speculation), and a restarted query repeats its last batch. So a row must have the
same identity in each attempt. Here it is (HS_PID, HS_SEQ): the producer id is a hash of the query
and the partition, the number is `batch << 32 | row`, where `row` counts the partition's rows from
0. A node stores a record with a known identity only once, but it knows only the last 1,024 numbers
of a producer. An attempt may be repeated from further back. It therefore asks the master how far
the producer came, and leaves out what is stored (client/producer/repeatable_sender.py).

Let `last` be the producer's greatest number in the master's log, and W = 1,023.

- *Invariant.* If number n is in the log of any node, all numbers up to n - W were confirmed, as the
  option `acks` asks. For an attempt puts n only once these are confirmed: some by itself, in order;
  those before its start because of this invariant for `last`, since it starts at `last - W + 1` at
  the latest. A batch begins only after all tasks of the batch before have been confirmed.
- *Nothing is lost.* What an attempt leaves out is at most `last - W`, hence confirmed: no failover
  cuts it (with `acks=1` a failover may, as it may cut any row). It puts all other rows again. Those
  that are not in the log, because a failover cut them or a node refused them, are stored now.
- *Nothing is stored twice.* The numbers that it puts again are in the node's window, which has at
  least the last 1,024 numbers in the log. A number that has left the window is refused, never
  stored. This also holds for two attempts at the same time: the one behind is refused, asks again,
  and goes on behind the other (`_overtaken`).
- *A stale answer does no harm.* A superseded master may answer: its log satisfies the invariant
  too. So may a master that is cut later. A master that has not replayed its log does not answer.
- *A producer that wrote long ago.* A node keeps 1,024 numbers of 4,096 producers, so at most 4,096
  tasks should write to a group at the same time. Of 61,440 more it keeps the last number, once that
  is confirmed, which is enough here: rule 3 in repeatable_sender.py has the details. Beyond these
  it forgets a producer, and a task repeated then writes its rows again.
- *A cut beyond the window*, possible with `acks=1` only: the node knows that it does not know, and
  the task fails with that reason.

**What it needs of the query.** A row's identity is its place in its partition. So each attempt must
get the same rows in the same order. The sources of files, Kafka and hastore give that; a shuffle
does not promise an order: sort within the partitions by columns that no two rows share, or
checkpoint before the write. A task that goes on after another attempt compares some rows with the
stored ones, and fails if they differ or if it has fewer rows than are stored. A change between rows
that it does not compare is not noticed, nor is an attempt without any row: a stream has many such
tasks, and they ask no node. A checkpoint belongs to one query: a copy of it, or an older state, has
the query's id, and gives its numbers to other rows. Spark never repeats a batch once a later one
has rows, so a task of such a batch fails (`_check_not_passed`).
"""
