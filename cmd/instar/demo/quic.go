// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"io"
	"strconv"
	"time"

	"instar/quicdemo"
)

// What the servers and the load of package quicdemo are told.
const (
	service = "instar-demo"
	// handshakeGrace is how long a superseded server waits for handshakes in
	// flight before it says GOAWAY, and drainDeadline how long connections may
	// stay after that.
	handshakeGrace = 2 * time.Second
	drainDeadline  = 30 * time.Second
	// probation is how long a predecessor can take back from its successor.
	probation = time.Second
	// stopDeadline is what a server that is stopped before the next one starts
	// grants its connections: while it waits, nobody serves new ones.
	stopDeadline = 500 * time.Millisecond
	// clientTimeout is how long a client waits for a handshake, and on a silent
	// connection. A machine that has much else to do can take seconds.
	clientTimeout = 15 * time.Second
)

// serverArgs are the arguments and the environment of a server process.
func serverArgs(m Method, number uint32, workers int, root string) (args, environ []string) {
	mode, deadline := quicdemo.ModeInstar, drainDeadline
	switch m {
	case MethodRestart:
		mode, deadline = quicdemo.ModePlain, stopDeadline
	case MethodReuseport:
		mode = quicdemo.ModeReusePort
	}
	n := strconv.FormatUint(uint64(number), 10)
	return []string{
			"serve", "--json", "--mode", string(mode), "--addr", listen, "--root", root, "--service", service,
			"--workers", strconv.Itoa(workers), "--build", "demo-" + n,
			"--handshake-grace", handshakeGrace.String(), "--deadline", deadline.String(), "--probation", probation.String(),
		},
		// Servers without a group cannot count themselves.
		[]string{"QUICDEMO_GENERATION=" + n}
}

// Server is a server process; args are those of the command quicdemo. It
// listens to signals itself, so ctx is only for its values.
func Server(ctx context.Context, args []string, stdout, stderr io.Writer, getenv func(string) string) int {
	return quicdemo.Main(context.WithoutCancel(ctx), args, quicdemo.Env{Stdout: stdout, Stderr: stderr, Getenv: getenv})
}

// parseReady reads the line with which a server says that it serves.
func parseReady(line []byte) (quicdemo.Ready, bool) {
	var r quicdemo.Ready
	err := json.Unmarshal(line, &r)
	return r, err == nil && r.PID != 0
}

// load puts load on the servers until the duration is over.
func load(ctx context.Context, o Options, sample func(quicdemo.Sample)) (*quicdemo.Result, error) {
	return quicdemo.Load(ctx, quicdemo.LoadConfig{
		Addr:             listen,
		Connections:      o.Connections,
		NewPerSecond:     o.Rate,
		HandshakeTimeout: clientTimeout,
		IdleTimeout:      clientTimeout,
		Duration:         o.Duration,
		Seed:             o.Seed,
		Sample:           sample,
	})
}
