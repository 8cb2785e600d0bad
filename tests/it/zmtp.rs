//! Peers on raw TCP that speak just enough ZMTP 3.0 to be a nuisance.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// How a peer treats each connection.
#[derive(Clone, Copy, Debug)]
pub enum Manner {
    /// Greets, says READY, and resets the connection at once.
    ResetAfterHandshake,
    /// Greets, says READY, waits for the subscription, and resets.
    ResetAfterSubscription,
    /// Accepts and says nothing.
    Mute,
    /// Greets and says nothing more.
    HalfGreeted,
    /// Answers as an HTTP server does.
    Http,
    /// Handshakes, then sends a frame of commands that `zeromq` does not know.
    UnknownCommand,
    /// Handshakes, then sends the head of a frame of so many bytes, a few of them, and closes.
    LengthBomb(u64),
    /// Handshakes as a socket type that does not match, and closes.
    WrongType,
}

/// A nuisance on a port of its own; dropping it frees the port.
pub struct RawPeer {
    pub endpoint: String,
    accepted: Arc<AtomicUsize>,
    ended: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl RawPeer {
    pub async fn start(manner: Manner, socket_type: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let (accepted, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (counter, ends) = (Arc::clone(&accepted), Arc::clone(&ended));
        let task = tokio::spawn(async move {
            // Mute connections stay open until the other side ends them or the peer goes away.
            let mut mute = tokio::task::JoinSet::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                counter.fetch_add(1, Ordering::SeqCst);
                if matches!(manner, Manner::Mute | Manner::HalfGreeted) {
                    let ends = Arc::clone(&ends);
                    mute.spawn(async move {
                        if matches!(manner, Manner::HalfGreeted) {
                            let _ = stream.write_all(&greeting()).await;
                        }
                        while matches!(stream.read(&mut [0; 64]).await, Ok(1..)) {}
                        ends.fetch_add(1, Ordering::SeqCst);
                    });
                } else {
                    let _ = treat(stream, manner, socket_type).await;
                }
            }
        });
        Self { endpoint, accepted, ended, task }
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    /// Connections of a mute peer that the other side has ended.
    pub fn ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }

    /// Goes away; the port is free when it returns.
    pub async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for RawPeer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn treat(mut stream: TcpStream, manner: Manner, socket_type: &str) -> std::io::Result<()> {
    match manner {
        Manner::Http => {
            let mut request = [0; 64];
            let _ = stream.read(&mut request).await?;
            return stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
        }
        Manner::WrongType => return handshake(&mut stream, "PULL").await,
        _ => handshake(&mut stream, socket_type).await?,
    }
    match manner {
        Manner::ResetAfterHandshake => reset(stream),
        Manner::ResetAfterSubscription => {
            let mut subscription = [0; 3];
            stream.read_exact(&mut subscription).await?;
            reset(stream)
        }
        Manner::UnknownCommand => stream.write_all(b"\x04\x05\x04PING").await,
        Manner::LengthBomb(length) => {
            let mut bomb = vec![0x02];
            bomb.extend_from_slice(&length.to_be_bytes());
            bomb.extend_from_slice(b"boom");
            stream.write_all(&bomb).await
        }
        _ => Ok(()),
    }
}

fn reset(stream: TcpStream) -> std::io::Result<()> {
    stream.set_zero_linger()
}

/// Our side of a ZMTP 3.0 handshake with the NULL mechanism. Our READY goes last, so that what follows it, a reset
/// for one, is there before the other side has done anything more.
async fn handshake(stream: &mut TcpStream, socket_type: &str) -> std::io::Result<()> {
    stream.write_all(&greeting()).await?;
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).await?;
    let mut head = [0; 2];
    stream.read_exact(&mut head).await?;
    let mut theirs = vec![0; usize::from(head[1])];
    stream.read_exact(&mut theirs).await?;
    let mut body = Vec::from(*b"\x05READY\x0bSocket-Type");
    body.extend_from_slice(&(socket_type.len() as u32).to_be_bytes());
    body.extend_from_slice(socket_type.as_bytes());
    let mut ready = vec![0x04, body.len() as u8];
    ready.append(&mut body);
    stream.write_all(&ready).await
}

fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// Dials a subscriber as a publisher would, shakes hands, and resets.
pub async fn connect_and_reset(endpoint: &str, socket_type: &str) {
    let mut stream = TcpStream::connect(endpoint.strip_prefix("tcp://").unwrap()).await.unwrap();
    // Turned away before the handshake is over: that is an end, too.
    let _ = handshake(&mut stream, socket_type).await;
    let _ = reset(stream);
}
