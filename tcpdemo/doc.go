// SPDX-License-Identifier: Apache-2.0

// Package tcpdemo shows what becomes of TCP connections when a server is
// replaced: by stop and start, by plain SO_REUSEPORT, and by package handover.
//
// [Server] is one process generation of an HTTP/1.1 server. [Load] puts load on
// its address and counts everything that clients lose, by kind. [Run] plays the
// scenarios with real processes in a network namespace of its own.
//
// What can be lost: a connection that waits in the accept queue of a listener
// that is closed is reset by the kernel; one that comes while nobody listens is
// refused. A listener that two processes share has one queue, so neither
// happens to it.
//
// What no server can prevent is the race of HTTP/1.1 (RFC 9112, section 9.3.1):
// a server closes a connection that is idle at the moment in which the client
// sends a request. Clients send such a request again. It is counted apart.
package tcpdemo
