// SPDX-License-Identifier: Apache-2.0

// Package quicgo makes quic-go serve on a generation of package dispatch.
//
// [Transports] gives one ready *quic.Transport for each worker socket. Its
// connection IDs name the socket, so packets find it whatever address they
// come from; its stateless-reset and token keys are those of the group, so
// every generation can answer for any other:
//
//   - A client whose server was killed sends to a connection ID of a dead
//     socket. The packet goes to the active generation, which answers with the
//     stateless reset that the client knows, after one round trip.
//   - A Retry or NEW_TOKEN token that one generation gave is good for the next.
//
// [ServerTLS] does the same for TLS session tickets, and [ServerConfig] lets
// only the active generation accept early data, so that a 0-RTT request that
// is replayed to an old generation is not served a second time.
//
// # Life cycle
//
// Listen and accept on all transports first, and activate the generation then.
// When it is superseded, keep accepting: handshakes that are in flight stay
// with this generation, and the successor may die. Listener.Close refuses
// them. Once no handshake can be in flight, send clients away (GOAWAY in
// HTTP/3), wait for the connections with Generation.Drain, close what is left
// and stay for three probe timeouts so that a lost CONNECTION_CLOSE can be
// repeated. Then close the listeners, the transports, and the generation, in
// this order.
//
// # Ownership
//
// The sockets belong to the generation. Transport.Close does not close them,
// and nothing but the transport may read them meanwhile. They are real
// *net.UDPConn: in a wrapper quic-go would use neither GSO nor ECN nor batched
// reads.
package quicgo
