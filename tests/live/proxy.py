"""A TCP proxy whose connections can be cut and slowed down."""
from harness import *


class Proxy:
    def __init__(self, to, cut_after=None, pause=0):
        """cut_after: bytes towards the client after which each connection is reset. pause: seconds between two reads of at
        most 64 KiB."""
        self.to, self.cut_after, self.pause, self.pairs = to, cut_after, pause, []
        self.port = ports()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", self.port))
        self.socket.listen(50)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            client, _ = self.socket.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                client.close()
                continue
            self.pairs.append((client, server))
            threading.Thread(target=self.pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self.pump, args=(server, client, True), daemon=True).start()

    def pump(self, source, sink, down):
        passed = 0
        try:
            while data := source.recv(65536):
                if down and self.cut_after and passed + len(data) > self.cut_after:
                    sink.sendall(data[:self.cut_after - passed])
                    break
                passed += len(data)
                sink.sendall(data)
                if down and self.pause:
                    time.sleep(self.pause)
        except OSError:
            pass
        for end in (source, sink):
            try:
                # A mere close waits for the other thread's read, and the peer would see a mute connection.
                end.shutdown(socket.SHUT_RDWR)
                end.close()
            except OSError:
                pass

    def cut(self):
        for pair in self.pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        self.pairs = []
