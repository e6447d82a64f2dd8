// SPDX-License-Identifier: Apache-2.0

// Package handover upgrades a running server: its listeners, other sockets,
// files and state go from process to process, and nothing is lost on the way.
//
// # Life cycle
//
// A server makes its Handover first, asks it for every listener, and says when
// it is ready:
//
//	h, err := handover.NewContext(ctx, handover.Options{Socket: "/run/app.sock"})
//	web, err := h.Listen("web", "tcp", ":443")
//	admin, err := h.Listen("admin", "tcp", "localhost:9100")
//	go server.Serve(web) // accepts from Ready on
//	err = h.Ready(ctx)   // an error: do not serve, exit
//	<-h.Superseded()     // another process serves now
//	server.Shutdown(ctx) // finish what is in flight
//	h.Close()
//
// Serve may return before Superseded is seen, with ErrSuperseded, because its
// listener ends at the same moment; the example of the package has this in full.
//
// There are two ways in which a successor starts, with the same protocol and the
// same result:
//
//   - exec: on SIGHUP or SIGUSR2, by Upgrade, or on request at the control
//     socket, the process starts its command line again, from the file that is
//     at the path now;
//   - takeover: somebody else starts a process with the same Options.Socket.
//
// The first process finds nobody, and binds its sockets itself or gets them by
// socket activation of systemd, by name.
//
// # What is guaranteed
//
// The predecessor serves until the successor's Ready. Then it stops accepting,
// the successor accepts, and for Options.Probation the predecessor stands by:
// when the successor dies, hangs or refuses in that time, the predecessor goes on
// as before. Only after that Superseded is closed. A failure at any step leaves
// one process serving, and the next upgrade is as good as the first. Connections
// that come during the switch wait in the kernel's accept queue, which both
// processes share. docs/handover-protocol.md has all steps, and what each side
// does when the other dies there.
//
// A predecessor that drains holds nothing that a successor needs, so upgrades
// during a drain are normal, up to Options.MaxGenerations.
//
// # Descriptors
//
// A successor gets exactly what has a name, and a connection with its
// predecessor; all descriptors are close-on-exec, and are compared with a
// manifest before they are used. Sockets stay non-blocking in both processes.
// Descriptors that were inherited and are not asked for by Ready are closed, and
// named in the log. The path of a Unix socket that was not asked for is removed
// when the predecessor has let go.
//
// What comes from elsewhere, without close-on-exec, such as a file that a shell
// left open, is named in the log and left alone.
//
// # UDP
//
// ListenPacket is for services that answer each datagram by itself. Flows that
// have to stay with their process are the matter of package dispatch; its
// Generation.Activate is a function for OnActivate, so that one upgrade moves
// both.
//
// # Needs
//
// Linux 5.10 or later, no privileges. Predecessor and successor run as the same
// user, or as root, or as one of Options.AllowUIDs.
//
// Methods may be called from several goroutines. Several Handovers in one
// process do not disturb each other, if their Options.Signals and
// Options.Socket differ.
package handover
