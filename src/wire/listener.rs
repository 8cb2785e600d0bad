//! A listener on which no more than so many connections stand at once.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::serve::Listener;
use futures::Stream;
use futures::stream::unfold;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// Accepts connections while there is a place for one; the others wait in the system's own queue, which is short.
/// What is written is sent at once: a stream's small pieces must not wait for the peer's acknowledgements.
#[derive(Debug)]
pub struct Limited {
    listener: TcpListener,
    places: Arc<Semaphore>,
}

impl Limited {
    /// Lets `connections` stand at once on `listener`.
    pub fn new(listener: TcpListener, connections: usize) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(connections)) }
    }

    /// The connections one after the other, for who wants a stream of them.
    pub fn incoming(self) -> impl Stream<Item = io::Result<Placed>> {
        unfold(self, |mut listener| async move {
            let (connection, _) = listener.accept().await;
            Some((Ok(connection), listener))
        })
    }
}

impl Listener for Limited {
    type Io = Placed;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Placed, SocketAddr) {
        // The semaphore is never closed, so there is always a place in the end.
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let (stream, peer) = Listener::accept(&mut self.listener).await;
        if let Err(error) = stream.set_nodelay(true) {
            // It is slow then, and not wrong; in most cases the peer has already hung up.
            tracing::debug!(%peer, %error, "a connection delays small writes");
        }
        (Placed { stream, _place: place }, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection with its place, which is free again when it is dropped.
#[derive(Debug)]
pub struct Placed {
    stream: TcpStream,
    _place: Option<OwnedSemaphorePermit>,
}

impl Connected for Placed {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Placed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, to)
    }
}

impl AsyncWrite for Placed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use futures::FutureExt;

    use super::*;

    /// A connection more than there are places is taken when another ends, and not before.
    #[tokio::test]
    async fn a_place_is_taken_and_given_back() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut listener = Limited::new(listener, 1);
        let _peers = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
        let (first, _) = listener.accept().await;
        assert!(listener.accept().now_or_never().is_none());
        assert!(first.stream.nodelay().unwrap(), "small writes wait");
        drop(first);
        listener.accept().await;
    }
}
