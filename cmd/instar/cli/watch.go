// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/fsnotify/fsnotify"
	"github.com/spf13/cobra"

	"instar/dispatch"
)

func (a *app) watchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "watch [GROUP]",
		Short: "Print a line for each change of the groups",
		Long: `Print a line for each change of a group, or of all groups, those that are made later
included, until SIGINT or SIGTERM, which is exit code 0. The first line of a group says
that it is watched: nothing that comes after it is missed.

  watched     the group is there, with that active generation (0: none)
  joined      the generation's sockets are registered
  activated   new flows go to it, for the first time or again
  superseded  another generation took its place: it drains
  left        it took its sockets out of the group, or somebody else did
  died        its sockets are gone, and it did not leave
  gone        it left or died; its process was gone, or hidden, when this command looked
  forgotten   the group's pins were removed

Times are those of the change; "left", "died" and "gone" have the time at which it was
noticed. With --json each event is a line of its own.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return fmt.Errorf("watch: unexpected argument %q", args[1])
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			ctx, stop := a.env.Interruptible(a.env.Context)
			defer stop()
			w := &watcher{app: a}
			if len(args) == 0 {
				return w.all(ctx)
			}
			e, err := a.resolve(args[0])
			if err != nil {
				return err
			}
			return w.group(ctx, e)
		},
	}
	a.jsonFlag(cmd)
	return cmd
}

// changeJSON is an event for programs.
type changeJSON struct {
	Version int    `json:"version"`
	Group   string `json:"group"`
	Path    string `json:"path"`
	dispatch.Change
}

// watcher prints the events of groups.
type watcher struct {
	app *app
	mu  sync.Mutex // of the output
}

const (
	eventWatched   = dispatch.ChangeKind("watched")
	eventForgotten = dispatch.ChangeKind("forgotten")
)

func (w *watcher) print(e dispatch.Entry, event dispatch.Change) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.app.env.Stdout
	if w.app.json {
		if err := json.NewEncoder(out).Encode(changeJSON{jsonVersion, shortName(e), e.Path, event}); err != nil {
			return fmt.Errorf("write event: %w", err)
		}
		return nil
	}
	line := event.Time.Format("2006-01-02T15:04:05.000Z07:00") + "  " + shortName(e)
	switch event.Kind {
	case eventForgotten:
		line += "  " + string(event.Kind)
	case eventWatched:
		line += fmt.Sprintf("  %-10s  active generation %d", event.Kind, event.Generation)
	default:
		line += fmt.Sprintf("  %-10s  generation %d, pid %d", event.Kind, event.Generation, event.PID)
		if event.Command != "" {
			line += " " + event.Command
		}
		if event.Build != "" {
			line += ", build " + event.Build
		}
	}
	if _, err := fmt.Fprintln(out, line); err != nil {
		return fmt.Errorf("write event: %w", err)
	}
	return nil
}

// group watches one group until it is forgotten.
func (w *watcher) group(ctx context.Context, e dispatch.Entry) (err error) {
	g, err := dispatch.OpenPath(e.Path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	var broken error
	watched := func() {
		s, err := g.Snapshot()
		if err == nil {
			err = w.print(e, dispatch.Change{Time: w.app.env.Now(), Kind: eventWatched, Generation: s.Active})
		}
		broken = err
	}
	err = g.Changes(ctx, watched, func(event dispatch.Change) error {
		if broken != nil {
			return broken
		}
		return w.print(e, event)
	})
	if errors.Is(err, dispatch.ErrNotExist) {
		return w.print(e, dispatch.Change{Time: w.app.env.Now(), Kind: eventForgotten})
	}
	return errors.Join(broken, err)
}

// all watches all groups below the root, and those that are made there.
func (w *watcher) all(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	folders, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	var running sync.WaitGroup
	watched := map[string]bool{}
	ended := make(chan string)
	defer func() {
		cancel(nil)
		go func() {
			running.Wait()
			close(ended)
		}()
		for range ended { // nobody waits for us
		}
		_ = folders.Close()
	}()
	for ctx.Err() == nil { // groups end with it, and are not to be watched anew
		entries, err := w.look(folders)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if watched[e.Path] {
				continue
			}
			watched[e.Path] = true
			if e.Err != nil {
				fmt.Fprintf(w.app.env.Stderr, "instar: watch: %s is left out: %s\n", shortName(e), oneLine(e.Err))
				continue
			}
			running.Go(func() {
				err := w.group(ctx, e)
				if err != nil && !errors.Is(err, dispatch.ErrNotExist) && ctx.Err() == nil {
					cancel(err)
				}
				ended <- e.Path
			})
		}
		select {
		case <-ctx.Done():
		case path := <-ended: // it may have been made anew
			delete(watched, path)
		case <-folders.Events:
		case err := <-folders.Errors:
			// Changes were missed, and are found by the look.
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return fmt.Errorf("watch: %w", err)
			}
		}
	}
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// look lists the groups after it has put the folders under watch in which others can
// appear.
func (w *watcher) look(folders *fsnotify.Watcher) ([]dispatch.Entry, error) {
	root := filepath.Clean(w.app.root)
	for at := root; ; at = filepath.Dir(at) {
		err := folders.Add(at)
		if err == nil {
			break
		}
		// The root is made with the first group: what is above it tells.
		if !errors.Is(err, fs.ErrNotExist) || at == filepath.Dir(at) {
			return nil, fmt.Errorf("watch %s: %w", at, err)
		}
	}
	namespaces, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("watch: %w", err)
	}
	for _, ns := range namespaces {
		if ns.IsDir() {
			if err := folders.Add(filepath.Join(root, ns.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("watch: %w", err)
			}
		}
	}
	return dispatch.List(root)
}
