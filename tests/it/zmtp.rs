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
    task: JoinHandle<()>,
}

impl RawPeer {
    pub async fn start(manner: Manner, socket_type: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let accepted = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&accepted);
        let task = tokio::spawn(async move {
            // Mute connections stay open for as long as the peer lives.
            let mut open = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                counter.fetch_add(1, Ordering::SeqCst);
                if matches!(manner, Manner::Mute | Manner::HalfGreeted) {
                    if matches!(manner, Manner::HalfGreeted) {
                        let _ = stream.write_all(&greeting()).await;
                    }
                    open.push(stream);
                } else {
                    let _ = treat(stream, manner, socket_type).await;
                }
            }
        });
        Self { endpoint, accepted, task }
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
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

/// Our side of a ZMTP 3.0 handshake with the NULL mechanism.
async fn handshake(stream: &mut TcpStream, socket_type: &str) -> std::io::Result<()> {
    stream.write_all(&greeting()).await?;
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).await?;
    let mut ready = Vec::from(*b"\x05READY\x0bSocket-Type");
    ready.extend_from_slice(&(socket_type.len() as u32).to_be_bytes());
    ready.extend_from_slice(socket_type.as_bytes());
    stream.write_all(&[0x04, ready.len() as u8]).await?;
    stream.write_all(&ready).await?;
    let mut head = [0; 2];
    stream.read_exact(&mut head).await?;
    let mut theirs = vec![0; usize::from(head[1])];
    stream.read_exact(&mut theirs).await.map(|_| ())
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
