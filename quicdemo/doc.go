// SPDX-License-Identifier: Apache-2.0

// Package quicdemo is an HTTP/3 server that upgrades itself with nothing lost,
// and a load client that proves it: the client counts every handshake that
// failed, every request that failed and every connection that broke.
//
// # Server
//
// A [Server] has one QUIC transport for each worker socket. Where the sockets
// come from is its [Mode]:
//
//   - [ModeInstar]: a generation of a group of package dispatch. A successor
//     activates itself when it is ready; the predecessor sees that, keeps
//     accepting the handshakes that are still in flight, says GOAWAY, waits for
//     its connections, closes what is left with H3_NO_ERROR, waits three probe
//     timeouts, and leaves. When the successor dies meanwhile, the predecessor
//     is active again and serves on.
//   - [ModeReusePort]: bare SO_REUSEPORT sockets, the way many servers reload.
//     The kernel spreads packets over old and new sockets alike, and the load
//     client shows what that costs.
//   - [ModePlain]: one socket; a second process cannot bind.
//
// Every connection has an http3.Server of its own. That is what lets GOAWAY
// reach connections one after the other, spread over time, instead of all at
// once, and what keeps a reinstated generation able to serve: an http3.Server
// that was shut down never serves again.
//
// # Load
//
// [Load] keeps persistent connections busy with downloads of which it verifies
// every byte, opens new connections all the time (part of them resumed with
// 0-RTT), moves client sockets to other ports in the middle of a download, and
// acts on GOAWAY as RFC 9114 section 5.2 wants it.
package quicdemo
