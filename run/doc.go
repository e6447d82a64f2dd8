// SPDX-License-Identifier: Apache-2.0

// Package run upgrades servers that know nothing of it. A small parent, whose process
// number never changes, holds the sockets and starts the server, which gets them by
// socket activation (sd_listen_fds(3)) and says READY=1 (sd_notify(3)).
//
// # Life cycle
//
// [New] binds, [Supervisor.Run] starts the server and returns when its context has ended
// and every process is gone. [Supervisor.Upgrade] replaces the server:
//
//  1. The successor starts, with the same TCP and Unix listeners, and with UDP sockets of
//     its own, which are a new generation of their group (package dispatch).
//  2. It says READY=1. New UDP flows go to it from then on. With TCP both processes accept.
//  3. It stands its probation, which ends early when the predecessor ends.
//  4. The predecessor reads its UDP sockets until its flows ended or Options.Drain is over.
//     They leave the group, and it reads their queues to the end.
//  5. It gets SIGTERM, and SIGKILL when it still runs after Options.Drain.
//
// Several predecessors may drain at once.
//
// # Ownership
//
// The parent keeps every socket open and reads none. So nothing that waits in a queue is
// lost between two processes, or when the server crashes: it is started again with the
// sockets it had, after a pause that doubles with each crash. The parent closes the UDP
// sockets of a predecessor when that one has ended. All sockets of an address belong to
// the parent's effective user, whatever user the server runs as.
//
// Descriptors are blocking unless Options.NonBlocking is set, as a service manager passes
// them. Each process is the leader of a process group, which is killed when it ends.
//
// # Failures
//
//	what fails                                    what happens
//	binding, or the first start                   New or Run returns the error
//	the successor cannot be executed, ends        Upgrade returns the error; the server was not
//	or is silent before READY=1                   touched; the successor's sockets are closed
//	the successor ends in its probation           as above; new UDP flows go to the predecessor again;
//	                                              datagrams that the successor did not read are lost
//	the server ends                               it is started again after 0.1 s to 30 s
//	the server ends while a successor starts      the upgrade goes on; should it fail, the server is
//	                                              started again
//	a second upgrade during one                   ErrUpgrading, nothing is started
//	too many processes drain                      ErrTooMany, nothing is started
//	the predecessor ignores SIGTERM               SIGKILL to its process group after Options.Drain
//	the predecessor stops reading UDP             after 5 s its queue is given up, and logged
//	a notification of another process             it is ignored
//	the parent is killed                          the server goes on until somebody stops it
//
// A server that ends at SIGTERM has to finish what it accepted or read before, as under
// any service manager.
//
// TCP and Unix listeners need Linux 5.10 and no privilege. UDP needs what package dispatch
// needs to make a group, and another user for the server needs CAP_SETUID and CAP_SETGID.
package run
