"""What a test sees of a warm process (warm_processes.py): its signals go there, its exit code comes back."""

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
asked = {"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ), "ignored": ignored}
with socket.socket(socket.AF_UNIX) as template:
    template.connect(sys.argv[1])
    data = json.dumps(asked).encode() + b"\n"
    sent = socket.send_fds(template, [data], [0, 1, 2])
    template.sendall(data[sent:])
    for number in PASSED_ON:
        if number not in ignored:
            signal.signal(number, lambda number, _: template.sendall(bytes([number])))
    code = int.from_bytes(template.recv(4), "little", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
