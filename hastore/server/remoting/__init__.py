"""RocketMQ's own clients and mqadmin, served on the client API's port (docs/rocketmq-clients.md).

`door.py` takes their frames and sends the answers; each other module has the handlers of one kind
of request. They use the parts of `server/api/`, so a put, a pull or a commit is the same thing
there and here.
"""
