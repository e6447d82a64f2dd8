// SPDX-License-Identifier: Apache-2.0

// Package drain sends the clients of a server that was superseded, or that
// ends, away with nothing lost.
//
// # Life cycle
//
// A Drainer is made when the server starts, and each thing that has clients
// is added to it: servers of net/http with [Drainer.HTTP], of HTTP/3 with
// [Drainer.HTTP3], and plain connections with [Drainer.Conns]. Until Run it
// only counts.
//
//	drainer := drain.New(drain.Options{})
//	web := drainer.HTTP(server)        // before Serve
//	go server.Serve(web.Listener(ln))  // ends with http.ErrServerClosed
//	...
//	report, err := drainer.Run(ctx)    // once, when the server is superseded
//
// [Drainer.Run] stops new connections and tells each client that it has to
// go. Most of them do, with their next request. In the second half of
// the deadline connections that are idle are closed, those first that are idle for
// longest, spread over the time so that not everybody comes back at once. At
// the deadline the rest is cut off, and never more than Options.CloseRate
// connections are closed in a second. [Drainer.Hurry], or a context that was
// cancelled with [ErrHurry] as its cause, moves the deadline to now.
// When Run returns nothing is open any more.
//
// # Planned or not
//
// Who is sent away can tell that from a fault: what Accept, Read and Write of
// tracked connections return then, and the causes of contexts
// ([context.Cause] of a request's context or of [Conn.Context]), match
// [ErrPlanned].
//
// Handlers whose work has no end (long polls, event streams, subscriptions)
// learn from [Draining], or from [Conn.Draining], that it is time to end it.
//
// # What is lost all the same
//
// HTTP/1.1. http.Server.Shutdown closes idle connections at once, and drops
// requests that arrive meanwhile. Run lets a connection's next request be
// answered, with "Connection: close", so a client that sends requests more often
// than every half of the deadline loses none. A connection that stayed idle for
// as long gets a FIN, and is read for another second. A request that
// crosses the FIN, within one round-trip time, cannot be answered any more (RFC
// 9112, section 9.5). It is not executed and gets no reset, and Report.Crossed
// counts it. The client sees the end of the connection before the first byte of
// a response, and repeats the request if that may be done (Go's Transport: GET,
// HEAD, OPTIONS, TRACE, or with an Idempotency-Key; browsers likewise). A
// client that sends requests ahead of responses (pipelining) has to
// repeat those that come after the one answered with "Connection: close".
//
// HTTP/2. The servers of net/http and of golang.org/x/net send one GOAWAY that
// names the last stream they have begun, and not first one with the largest
// number as RFC 9113, section 6.8, recommends. A request which crosses it
// is not executed, and the client knows so and repeats it. Go's Transport
// does, but for a body that it cannot rewind. To make that rare, GOAWAY is sent
// when a request has come, since a client that has just sent one is seldom
// about to send the next. The connection ends a second after its last
// response.
//
// Each HTTP/2 connection gets its GOAWAY at its own time, which needs net/http's own
// implementation. With another one in Server.TLSNextProto, clients are told with
// their next response, and idle connections are closed without GOAWAY, as
// those of HTTP/1.1 are.
//
// HTTP/3. A Shutdowner is told when a request has come, or when it is its turn
// as an idle one, and closed a second after its last response.
//
// Connections that the kernel has completed, and Accept not yet returned, are
// the successor's when it has a duplicate of the listener; without a
// successor the kernel resets them when the listener is closed.
//
// # Needs
//
// Options.Logger, Progress and the contexts are optional. The numbers of
// unread and unsent bytes, and the check for a request that has come but was not read
// yet, need TCP or Unix connections on Linux; elsewhere they are left out.
package drain
