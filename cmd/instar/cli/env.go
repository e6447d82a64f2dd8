// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"io"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"

	"instar/dispatch"
)

// Env is everything that the command takes from its surroundings.
type Env struct {
	// Context ends a command that waits. Default context.Background.
	Context context.Context

	// Interruptible makes a context that ends at Ctrl-C, for commands that have
	// something to tidy up then. All others just die. Default: no signal is caught.
	Interruptible func(context.Context) (context.Context, context.CancelFunc)

	// Args are the arguments, without the program's name.
	Args []string

	Stdout io.Writer
	Stderr io.Writer

	// Getenv reads the environment. Default: everything is unset.
	Getenv func(string) string

	// Terminal says whether one of the writers is a terminal. Default: none is.
	Terminal func(io.Writer) bool

	// Now is the clock of countdowns. Default time.Now.
	Now func() time.Time

	// Root is the pin folder when --root does not name another.
	// Default dispatch.DefaultRoot.
	Root string

	// Self is how the demo starts this program again: the file, and the name
	// that the program gets as its zeroth argument.
	// Default "/proc/self/exe" under the name "instar".
	Self [2]string
}

// System is the environment of the running process.
func System() Env {
	return Env{
		Args:   os.Args[1:],
		Stdout: os.Stdout,
		Stderr: os.Stderr,
		Getenv: os.Getenv,
		Interruptible: func(ctx context.Context) (context.Context, context.CancelFunc) {
			return signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM)
		},
		Terminal: func(w io.Writer) bool {
			f, ok := w.(*os.File)
			if !ok {
				return false
			}
			_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
			return err == nil
		},
		Self: [2]string{"/proc/self/exe", os.Args[0]},
	}
}

func (e *Env) setDefaults() {
	if e.Context == nil {
		e.Context = context.Background()
	}
	if e.Interruptible == nil {
		e.Interruptible = context.WithCancel
	}
	if e.Stdout == nil {
		e.Stdout = io.Discard
	}
	if e.Stderr == nil {
		e.Stderr = io.Discard
	}
	if e.Getenv == nil {
		e.Getenv = func(string) string { return "" }
	}
	if e.Terminal == nil {
		e.Terminal = func(io.Writer) bool { return false }
	}
	if e.Now == nil {
		e.Now = time.Now
	}
	if e.Root == "" {
		e.Root = dispatch.DefaultRoot
	}
	if e.Self[0] == "" {
		e.Self = [2]string{"/proc/self/exe", "instar"}
	}
}

// colours says whether w may get colours: a terminal, and nobody objects
// (https://no-color.org).
func (e *Env) colours(w io.Writer) bool {
	return e.Terminal(w) && e.Getenv("NO_COLOR") == "" && e.Getenv("TERM") != "dumb"
}
